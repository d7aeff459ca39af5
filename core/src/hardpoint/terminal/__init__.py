"""Helpers of commands: options of an engine, tables, files, progress, commands that are imported when they run."""
