"""What a tensor becomes."""
