"""Names for inspect_ai: the model provider ``arbor`` and the solver ``search``.

    inspect eval task.py --model arbor/builtin:sapling -M controller=tot -M budget=0.25
    inspect eval task.py --model arbor/builtin:sapling --solver arbor/search -S controller=beam

inspect_ai imports this module by its entry point, so it imports nothing of arbor's engine. Needs
``arbor-search[inspect]``.
"""

from __future__ import annotations

from typing import Any

from inspect_ai._util.registry import registry_name
from inspect_ai.model import GenerateConfigArgs, ModelAPI, modelapi
from inspect_ai.solver import Generate, Solver, TaskState, solver


@modelapi(name="arbor")
def arbor() -> type[ModelAPI]:
    """The provider, imported when a model is named."""
    from arbor.integrations.inspect_ai.model import ArborAPI

    return ArborAPI


def _registered(name: str) -> str:
    """What inspect is told, so that it registers ``arbor/NAME``.

    inspect adds the package's name by itself, except where the package is installed editable and
    its distribution has another name, as arbor's has.
    """
    whole = f"arbor/{name}"
    return name if registry_name(_registered, name) == whole else whole


@solver(name=_registered("search"))
def search(controller: str | dict[str, Any] | list[str] = "tot", **settings: Any) -> Solver:
    """A search for the next message of every sample, whatever the model's own default is.

    The model is one of the provider ``arbor``, or of ``openai-api`` where ``arbor serve`` answers.
    With the provider, the sample's store has the facts of the search under ``arbor``.

    Args:
        controller: its name, perhaps with settings.
        settings: others of the search, see `SearchSettings`.
    """
    asked = {"controller": controller, **settings}

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        options: GenerateConfigArgs = {"extra_body": {"arbor": asked}}
        state = await generate(state, **options)
        found = (state.output.metadata or {}).get("arbor")
        if found is not None:
            state.store.set("arbor", found)
        return state

    return solve
