"""The layer stream against whole models in memory."""
