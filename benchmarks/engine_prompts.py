"""Prompts of the engine's benchmark: some whose answers copy from them, others whose answers do not; a JSON schema.

In: nothing. Out: messages of chats. The texts are written for this file.
"""

_REPORT = (
    "The harbour of Lindholm was built in 1894 by the engineer Marta Voss, who wanted a place where small boats could "
    "wait out the autumn storms. She wrote in her diary: 'A harbour is a promise that the sea cannot keep.' The east "
    "wall, 212 metres long, was finished first, and the lighthouse followed in 1901. After the flood of 1953 the town "
    "council decided to raise the quay by 80 centimetres, which cost 1.2 million crowns and took three years."
)
_CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))
"""

COPYING = (
    f"Repeat the following text word for word, and nothing else.\n\n{_REPORT}",
    f"Copy this Python code exactly as it is, but rename the class Account to Wallet.\n\n{_CODE}",
    f"List every sentence of the following text, one a line, each in quotation marks.\n\n{_REPORT}",
)
OTHER = (
    "Write a short story about a fox who learns to swim.",
    "Why is the sky blue in the day and red in the evening? Explain it to a child.",
    "Give me a plan for a week of dinners for two people who like vegetables.",
)
PERSON = "Invent a person: give a name, an age, a city and three hobbies, as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "age", "city", "hobbies"],
    "additionalProperties": False,
}
