"""The pipelines that carry frames: stages in this process, or workers that the coordinator reaches."""
