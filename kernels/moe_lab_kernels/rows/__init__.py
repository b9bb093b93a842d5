"""What happens to rows between the products: quantisation, gated activation, the weighted sum back into token order."""
