"""StageCache shared by several processes and kept on disk."""
