"""`featviz.ray.run` draws the images of a run by actors of Ray, on one machine or on a cluster."""

from featviz.api.cluster import run

__all__ = ["run"]
