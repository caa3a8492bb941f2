"""How replicas keep their weights equal: all-reduce, ZeRO, local SGD, parameter servers."""
