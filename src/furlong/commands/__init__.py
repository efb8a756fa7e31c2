"""The commands: functions that take the words after the command's name and return the exit code."""
