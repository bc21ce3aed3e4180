"""An HTTP server: requests in OpenAI's format, all of them in one engine."""

from arbor.feature import Feature

FEATURE = Feature(
    commands={
        "serve": (
            "arbor.integrations.server.serve:serve",
            "Serve a model over HTTP, in OpenAI's format.",
        )
    },
    extras={"server": ("arbor serve", ("fastapi", "prometheus_client", "pydantic", "uvicorn"))},
)
