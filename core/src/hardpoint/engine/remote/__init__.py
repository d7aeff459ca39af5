"""A core that runs in a process or thread of its own, behind the client that a core in this one has."""
