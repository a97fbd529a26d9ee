"""Tests of loading and generating."""
