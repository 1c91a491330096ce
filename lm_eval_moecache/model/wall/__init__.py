"""Real transfers of real experts: the wall clock's half that knows torch."""
