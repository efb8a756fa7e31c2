#!/usr/bin/env bash
# mini-swe-agent from PyPI, unmodified, on a toy repository (solve.py), with a scripted endpoint in place of a model.
#
#   pip install mini-swe-agent && bash examples/mini_swe_agent/run.sh      # half a minute on a CPU
#
# To train a model of your own: furlong train --hf-checkpoint DIR --agent-command "python .../solve.py"
#   --prompt-data tasks.jsonl --max-turns 8 ...   Output goes to $OUT (default: outputs/mini_swe_agent).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/mini_swe_agent}"
port="${PORT:-31234}"
mkdir -p "$out"

python "$here/scripted_model.py" "$port" &
trap "kill $!" EXIT
echo '{"input": "double() in calc.py is wrong: tests.py fails. Repair it."}' > "$out/tasks.jsonl"
furlong eval "$out/tasks.jsonl" --base-url "http://127.0.0.1:$port/v1" --agent-command "python $here/solve.py" \
  --episode-timeout 120 --samples 2 --output "$out/records.jsonl" "$@"
