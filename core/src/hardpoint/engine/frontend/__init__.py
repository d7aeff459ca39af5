"""Between text and tokens: prompts, conversations, streams."""
