"""``python -m moefleet``: the same as the ``moefleet`` command."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="moefleet")
