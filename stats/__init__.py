"""The RNG quality suite: how good are the masks of a dropout, and how sure is the answer."""

from stats.assess import Assessment, assess
from stats.sources import Source, SourceError

__all__ = ["Assessment", "Source", "SourceError", "assess"]
