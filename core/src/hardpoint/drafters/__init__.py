"""What core itself drafts with."""
