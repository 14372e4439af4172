"""The dispatch around a grouped GEMM: rows sorted by expert, and back, at sizes that do not depend on the routing."""
