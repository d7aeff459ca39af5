"""Requests, pages and steps: what runs next, and where its tokens are kept. Knows no device."""
