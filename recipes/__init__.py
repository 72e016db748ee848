"""Recipes: settings for a model on a machine, one YAML file each."""
