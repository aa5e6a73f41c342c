"""What the user of a recipe can put right."""


class RecipeError(Exception):
    """One sentence that says what is wrong and what to do; the command line exits with code 2."""
