"""Several ranks that serve one model: groups, collectives, and the control plane between them."""
