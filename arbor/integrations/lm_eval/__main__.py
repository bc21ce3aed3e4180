"""lm-eval's own command, with the model ``arbor``: ``python -m arbor.integrations.lm_eval``."""

import sys

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    import arbor.integrations.lm_eval.model  # noqa: F401  # registers it

    sys.exit(cli_evaluate())
