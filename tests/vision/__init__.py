"""Tests of pictures: tower, preprocessing, prompts, files."""
