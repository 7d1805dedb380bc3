"""Models of lost time as functions of numbers, each with its unit, origin and spread."""
