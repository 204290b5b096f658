"""``python -m fastpersist``: the same as the command ``fastpersist``."""

from fastpersist.cli import app

app()
