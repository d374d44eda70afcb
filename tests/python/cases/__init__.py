"""What users of comparable libraries ran into, tried on muvox: README.md says which test answers which report."""
