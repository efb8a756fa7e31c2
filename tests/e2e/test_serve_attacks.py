"""`benchmarks/cpu/server_attacks.py`, a twentieth of it: `/health` answers within 1 s, and memory is released."""

from __future__ import annotations

from pathlib import Path

import pytest

from furlong.models.presets import write_preset

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu"
HEALTH_S = 1.0
LEFT_MB = 200  # of what allocators keep after each attack, on a server that was idle before


def test_health_answers_within_a_second_under_every_attack(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import server_attacks

    slow, left = {}, {}
    folder = write_preset("tiny", tmp_path / "model")
    with server_attacks.running_server(folder, *server_attacks.FLAGS) as server:
        for name, attack in server_attacks.attacks(num_connections=200, scale=20).items():
            answers, health_s, _, left_mb = server_attacks.measured(server, attack)
            assert "5" not in answers.split()[0], (name, answers)
            left[name] = left_mb
            if health_s > HEALTH_S + 5 * server.late_s:  # what a busy machine adds to every step of the exchange
                slow[name] = health_s
    assert slow == {}
    assert max(left.values()) < LEFT_MB, left
