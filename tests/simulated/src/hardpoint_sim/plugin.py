"""The plugin's hook module. It implements no hook: what the plugin offers stands in ``hardpoint.toml``."""
