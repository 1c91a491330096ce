"""The torch-free core: what is resident, what moves, and when. A live run and a replay share it."""
