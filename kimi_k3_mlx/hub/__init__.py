"""What talks to the Hugging Face Hub."""
