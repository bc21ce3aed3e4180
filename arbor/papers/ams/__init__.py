"""AMS: segments of equal attention mass, and its control of equal lengths."""

from arbor.feature import Feature

FEATURE = Feature(
    names={
        "policy": {
            "ams": "arbor.papers.ams.ams:POLICY",
            "strata": "arbor.papers.ams.ams:STRATA",
        },
        "allocator": {
            "ams": "arbor.papers.ams.ams:AMS",
            "strata": "arbor.papers.ams.ams:Strata",
        },
    },
)
