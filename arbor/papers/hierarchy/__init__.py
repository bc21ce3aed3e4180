"""The memory hierarchy: tokens destroyed at intervals, compressed, or kept in host memory."""

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "policy": {
            "hierarchy": "arbor.papers.hierarchy.hierarchy:POLICY",
        },
        "scorer": {
            "combined": "arbor.papers.hierarchy.combined:Combined",
        },
        "allocator": {
            "hierarchy": "arbor.papers.hierarchy.hierarchy:Hierarchy",
        },
    },
)
