"""Release branches: picks, reverts, cuts and bisection. scripts/*.sh call `python -m scripts.release COMMAND`.

Standard library only: it runs on any checkout, also of an old release branch.
"""
