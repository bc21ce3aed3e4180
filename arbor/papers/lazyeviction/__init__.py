"""LazyEviction: tokens that are read at intervals stay while they are due."""

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "policy": {
            "lazyeviction": "arbor.papers.lazyeviction.lazy_eviction:POLICY",
        },
        "scorer": {
            "lazyeviction": "arbor.papers.lazyeviction.lazy_eviction:LazyEviction",
        },
    },
    calibrations={
        "window": (
            "arbor.papers.lazyeviction.command:window",
            "Measure alpha and the window of LazyEviction: solve problems, see when tokens are read again.",
        ),
    },
)
