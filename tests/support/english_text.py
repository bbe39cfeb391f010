"""A fixed English text for measuring perplexity: prose of several kinds, 1,700 tokens."""

_WRAPPED = """\
The harbour at Ellenport is older than the town. Before there were houses there was a shelf of
flat rock on the lee side of the point, and the people who fished the bay in summer pulled their
boats up on it and slept under the hulls when the weather turned. In time somebody built a shed
for the nets, and then another for the salt, and when the first winter came that was mild enough
to stay through, three families did not go home. The parish book gives their names, and two of the
three are still painted over shop doors on the quay.

What made the town rich, for a while, was not fish but stone. The cliffs north of the point are a
hard grey limestone that splits cleanly and does not weather, and in the years when the cities
were paving their streets every barge that could float was sent round the coast to fetch it. The
quarry worked by daylight in winter and by lantern in summer. Men came from the hill villages and
were paid by the cart. A good pair could load nine in a day. They lived in long low houses behind
the church, four to a room, and the doctor who came twice a month wrote that he had never seen so
many broken fingers in one place.

When the railway reached the valley the trade ended within five years. Stone from inland was
cheaper, and the barges rotted at their moorings. It is often said that the town slept after that,
but it would be truer to say that it went back to what it had been doing before, with better
houses to do it in.

Why does a boat float at all? A solid lump of iron sinks, and yet a ship made of many thousand
tons of iron does not. The answer lies in how much water has to be pushed aside. Anything that is
lowered into water pushes some of it away, and the water pushes back, upward, with a force that is
exactly as large as the weight of the water that was moved. A lump of iron moves only as much
water as the lump itself takes up, and that much water weighs far less than the iron does. A ship,
however, is mostly air. Its hull takes up a great deal of room, so that it can move a great deal
of water before the water reaches its deck. As cargo is loaded the hull settles lower, more water
is moved, and the force that holds it up grows until it is again as large as the weight. If the
cargo is too heavy, the deck goes under before the two are equal, water runs in, and the ship is
lost.

You can try this in a kitchen. Take a sheet of foil, fold it into a small tray with high sides,
and set it on a bowl of water. Put coins into it one at a time and count how many it carries. Then
take the same sheet, press it into a tight ball, and drop it in. It is the same metal with the
same weight, and it goes straight to the bottom. Try trays of other shapes. A wide one with low
sides is steady but takes in water early, and a narrow one with high sides carries more but tips
over if the coins lie to one side. Anyone who has tried it for ten minutes will understand why
loading a ship was once a trade of its own.

"I don't see why we have to go today," said Martin. He was standing at the window with his coat
half on. "It has rained since Tuesday. The road will be under water by the mill."

"The road is always under water by the mill," his sister said. "We can leave the car at the top
and walk down. It is only half an hour, and she is expecting us."

"She is expecting us because you told her that we would come."

"And we will." Anna took the basket from the table and looked into it. There was bread in it, and
a jar of the plum jam that their aunt liked, and a letter which neither of them had opened. It had
come on Monday with a stamp from a country that did not print stamps any more. "You can carry
this. I will take the lamp, in case it gets dark before we are back."

He sighed, put his other arm into its sleeve, and followed her out. The rain had thinned to
something like mist. From the gate they could see the whole valley, brown and silver, with the
river spread across the lower fields and the tops of the fence posts standing out of it in a line.
Neither of them said a word until they had passed the last house.

To make the soup, chop two onions and a stick of celery and let them soften in a little butter
over a low heat. This takes longer than most people think, about fifteen minutes, and it should
not be hurried: the onions are ready when they are clear and have begun to smell sweet. Add three
large potatoes, peeled and cut into pieces of the same size, and stir them round so that they are
covered. Pour on a litre of stock, bring it to the boil, and then turn it down and leave it to
simmer until the potatoes fall apart when they are pressed with a spoon. Take it off the heat. If
you like a smooth soup, blend all of it; if you like some texture, blend half and return it to the
pan. Add a glass of milk and season with salt and plenty of black pepper. It is better on the
second day than on the first.

The committee met four times between March and June. It heard evidence from nineteen witnesses,
among them the directors of both companies, and it visited the site on two occasions. Its findings
may be put briefly. First, the bridge was sound when it was opened, and the design was not at
fault. Second, the inspections that were due in the third and the sixth year were not carried out,
although they had been paid for. Third, when cracks were reported by a member of the public, the
letter was passed between two offices for eleven weeks, because each believed that the other was
responsible. The committee does not believe that any one person can be blamed. It does believe
that the arrangement under which nobody could be blamed was itself the cause, and it recommends
that the ownership of every structure on the network be written down in one place, with a name,
and that the list be open to anyone who asks for it.

Birds find their way over distances that are hard to imagine. A young cuckoo, raised by parents of
another species that never leave the garden, sets out alone in August and flies to a forest in
Africa which it has never seen. It travels at night, and it arrives within a few miles of the
place where its real parents spent the winter before. For a long time nobody could say how this
was done. Experiments with caged birds showed that they turn towards the south in autumn even when
they cannot see the sky, and that they turn the other way if the magnetic field around the cage is
reversed. Others, shown only the stars inside a planetarium, follow the stars. It seems that they
carry several compasses and check one against another, and that the sunset, when all of them can
be read at once, is when they set the one by the rest. What tells them how far to go is less
clear. The simplest idea is that they fly for a certain number of nights and then stop, and for
many of them this seems to be true.

My grandfather kept an account of the weather for fifty-one years. Each evening at six he went out
to the gauge behind the barn, read it with his glasses pushed up on his forehead, and wrote the
number in a book with the date, the wind, and one remark. The remarks are what I read now.
"Swallows gone." "First frost, beans lost." "Wet, but nobody minded." On the day my mother was
born he wrote "Clear, a girl." He never drew any conclusion from all these numbers, and when a man
from the university asked whether he might copy them he was surprised that they could be of use to
anybody. The man sent him a chart a year later. It hung in the kitchen until the house was sold, a
thin blue line that went up and down and, if you stood far enough away from it, slowly up.
"""

ENGLISH = "\n\n".join(" ".join(part.split()) for part in _WRAPPED.split("\n\n"))
