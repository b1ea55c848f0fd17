"""Rows: read, tokenised once, dealt to ranks."""
