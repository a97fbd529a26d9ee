"""Tests of kimi_k3.py."""
