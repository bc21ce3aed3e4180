"""The processes of ``arbor eval --workers``, as actors of Ray on one machine or many."""

from arbor.feature import Feature

FEATURE = Feature(
    parts={"cluster": {"ray": "arbor.integrations.ray.ray_cluster:RayCluster"}},
    extras={"ray": ("arbor eval --workers", ("ray",))},
)
