"""What several test files need; nothing here is collected."""
