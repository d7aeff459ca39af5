"""Tools for authors of plugins: scaffolding, the reference of the plugin API, and the comparison of two versions."""
