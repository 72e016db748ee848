"""Gemma 3: sizes (`spec`), the definition (`gemma3`) against a set of operators (`ops`), and readers of configs."""
