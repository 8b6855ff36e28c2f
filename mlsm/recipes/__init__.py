"""Recipes: YAML files of the settings that flags set."""
