"""Everything that touches transformers: MoE layers, routers, weight stores, experts."""
