"""Keeps the log of a run working: user code can silence it without an error, as `logging.config.dictConfig` does."""

from __future__ import annotations

import logging


class LogState:
    """Levels and handlers of furlong's loggers when the object is created; `repair` restores them.

    >>> state = LogState()
    >>> logging.disable(logging.CRITICAL)
    >>> state.repair()
    ['it disabled logging up to level CRITICAL']
    >>> state.repair()
    []
    """

    def __init__(self, name: str = "furlong") -> None:
        known = logging.root.manager.loggerDict.items()
        self._logger = logging.getLogger(name)
        self._loggers = [each for key, each in known if isinstance(each, logging.Logger) and key.startswith(name)]
        self._handlers, self._level = tuple(self._logger.handlers), self._logger.level
        self._disabled = logging.root.manager.disable

    def repair(self) -> list[str]:
        """Undo what keeps messages out of the log; describe each change, such as "it disabled logging"."""
        found: list[str] = []
        if (disabled := logging.root.manager.disable) > self._disabled:
            found.append(f"it disabled logging up to level {logging.getLevelName(disabled)}")
            logging.disable(self._disabled)
        if silent := [each for each in self._loggers if each.disabled]:
            found.append(f"it disabled {len(silent)} loggers, as logging.config does by disable_existing_loggers")
            for each in silent:
                each.disabled = False
        if missing := [each for each in self._handlers if each not in self._logger.handlers]:
            found.append(f"it removed {len(missing)} handlers of the logger {self._logger.name}")
            for each in missing:
                self._logger.addHandler(each)
        if self._logger.level > self._level:
            found.append(f"it raised the level of the logger {self._logger.name}")
            self._logger.setLevel(self._level)
        return found
