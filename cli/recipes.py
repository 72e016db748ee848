"""`wicore recipes`: list the packaged recipes, show one with its final values."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from wicore_trt.cli._options import complete_recipes

app = typer.Typer(help="List and show the packaged recipes.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """List and show the packaged recipes: settings for a model on a machine. Without a command, list them."""
    if context.invoked_subcommand is None:
        list_command()


@app.command("list")
def list_command(json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """List the packaged recipes with their first comment line."""
    from wicore_trt.cli._ui import print_json, print_table
    from wicore_trt.recipe import list_recipes, resolve_recipe

    texts = {name: resolve_recipe(name).read_text(encoding="utf-8") for name in list_recipes()}
    rows = [(name, text.splitlines()[0].lstrip("# ")) for name, text in texts.items()]
    if json:
        print_json([{"name": name, "about": about} for name, about in rows])
    else:
        print_table("recipes", ("name", "about"), rows)


@app.command("show")
def show_command(
    recipe: Annotated[str, Argument(help="Recipe name or path.", autocompletion=complete_recipes)],
    raw: Annotated[bool, Option("--raw", help="Print the file itself, to copy and edit.")] = False,
) -> None:
    """Print the final values of a recipe and where each one came from."""
    from wicore_trt.config import resolve_settings
    from wicore_trt.recipe import resolve_recipe

    if raw:
        print(resolve_recipe(recipe).read_text(encoding="utf-8"), end="")
    else:
        print(resolve_settings(recipe).render(), end="")
