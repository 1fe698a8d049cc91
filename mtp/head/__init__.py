"""The MTP head and the drafts it makes."""
