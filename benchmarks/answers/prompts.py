"""Twenty prompts for comparing answers: prose, code, several languages, numbers, one token, and one beyond the window.

Plain text. Invariant: the same on every machine, so that an oracle's file can be made again.
"""

from __future__ import annotations

PROMPTS: dict[str, str] = {
    "prose": "The old lighthouse keeper climbed the stairs for the last time. "
    "Outside, the storm had already begun, and",
    "facts": "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    "science": "Photosynthesis is the process by which plants use sunlight to turn water and carbon dioxide into",
    "history": "In 1969, two astronauts walked on the surface of the Moon for the first time. The mission was called",
    "recipe": "Ingredients: 200 g flour, 3 eggs, 100 g sugar, a pinch of salt.\n\nMethod:\n1. Preheat the oven to",
    "dialogue": '"Where have you been?" she asked.\n"I went to the market," he said, "but there was nothing left."\n"',
    "python": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "sql": "SELECT customers.name, SUM(orders.total) FROM customers JOIN orders ON orders.customer_id =",
    "json": '{"users": [{"id": 1, "name": "Ada", "email": "ada@example.org"}, {"id": 2, "name": "Grace", "email":',
    "html": "<!DOCTYPE html>\n<html>\n  <head>\n    <title>My first page</title>\n  </head>\n  <body>\n    <h1>",
    "german": "Die Donau ist nach der Wolga der zweitlängste Fluss in Europa. Sie entspringt im Schwarzwald und mündet",
    "french": "La tour Eiffel est une tour de fer située à Paris. Construite en 1889 par Gustave Eiffel, elle",
    "spanish": "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía",
    "russian": "Москва — столица России, крупнейший по численности населения город страны. Город расположен на",
    "chinese": "北京是中华人民共和国的首都，位于华北平原的北部。这座城市",
    "numbers": "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024,",
    "sum": "12 + 7 = 19\n23 + 45 = 68\n31 + 11 = 42\n50 + 27 =",
}
LONG, SINGLE = "long", "single"
LONG_ROUNDS = 2


def long_text() -> str:
    """All other texts, as numbered notes, several times over: far more tokens than a window of 512."""
    notes = [f"Note {i + 1} of round {r + 1} ({name}):\n{text}\n" for r in range(LONG_ROUNDS) for i, (name, text) in
             enumerate(PROMPTS.items())]  # fmt: skip
    return "\n".join(notes)
