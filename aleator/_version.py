"""The version, in one place; pyproject.toml and saved fits read it here."""

__version__ = "0.1.0"
