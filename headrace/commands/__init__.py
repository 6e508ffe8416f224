"""The commands of `headrace`, one a file; each file's `command` is what the group runs."""
