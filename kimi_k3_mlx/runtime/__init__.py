"""Running a build: loading it, and generating text through mlx-lm."""
