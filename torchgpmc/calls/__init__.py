"""sample(), the only loop over draws: with a method, without one, of any density; what may be run; point fits; runs pooled."""
