"""Pictures as users have them, and the tower that makes features of them, for any checkpoint."""
