"""The model: what Gemma 3 is (`spec`), written once (`gemma3`) against an operator set (`ops`), and its lowerings."""
